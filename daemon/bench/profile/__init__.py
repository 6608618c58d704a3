"""`bench profile`: where the time of a decode step and of a prefill chunk goes, operator by operator."""
