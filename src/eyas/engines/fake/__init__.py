"""A public fake target for tests."""
