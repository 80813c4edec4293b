"""The command ``kvbus status``: what agents hold and do now, and what happens at one of them."""
