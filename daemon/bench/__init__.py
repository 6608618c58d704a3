"""`deepinfer-daemon bench`: what this machine gets out of the daemon, beside the limit or a peer in the same run."""
