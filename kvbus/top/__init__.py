"""The command ``kvbus top``: what some agents do now, in a terminal."""
