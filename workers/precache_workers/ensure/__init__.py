"""The version that a training script needs: opened, or built once for all that need it."""
