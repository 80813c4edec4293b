"""A small transformer and two engines that hand its requests off. They use only the SDK."""
