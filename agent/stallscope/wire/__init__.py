"""What capture, parser and aggregate have in common: hook table, records, frames."""
