"""The staging slots of an agent, on each device, and the threads that copy to and from them."""
