"""The privileged part: links probes, drains rings, reads /proc, sends frames."""
