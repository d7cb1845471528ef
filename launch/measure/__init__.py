"""`hetrl probe`, `hetrl profile` and `hetrl doctor --deep`: what tasks at the sites find."""
