"""`deepinfer-daemon stress`: real daemons under load and faults, and what must hold afterwards."""
