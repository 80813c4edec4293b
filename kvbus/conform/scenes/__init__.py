"""What conform does to an engine: scenes, each with steps that end in expectations."""
