"""The simulated job."""
