"""`bench peers`: the daemon beside other programs that serve the same file, each in a process of its own."""
