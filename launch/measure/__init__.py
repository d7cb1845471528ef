"""`hetrl probe` and `hetrl profile`: measuring links and machines, by tasks at the sites."""
