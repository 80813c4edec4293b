"""What both agents share: the process, the local engines, and the staging slots."""
