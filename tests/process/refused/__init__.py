"""What agents refuse: frames that make no sense, engines and requests that cannot be."""
