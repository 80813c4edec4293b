"""Tools that measure, show and try kvbus: each a command of `kvbus`."""
