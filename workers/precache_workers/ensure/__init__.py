"""The version that a training asks for: there, or built once, however many ask."""
