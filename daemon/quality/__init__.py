"""`deepinfer-daemon kv-quality`: what a KV format changes in what a model says."""
