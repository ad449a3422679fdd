"""Sources, which list and fetch samples; the user's own code and its identity."""
