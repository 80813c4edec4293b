"""What strangers, and engines that lie, may and may not do."""
