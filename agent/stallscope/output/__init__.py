"""Reports: JSON and the terminal."""
