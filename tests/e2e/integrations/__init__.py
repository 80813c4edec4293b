"""What stands beside an engine or joins it to kvbus."""
