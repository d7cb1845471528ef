"""The training engine: megatron-core on the ranks of one layout. Nothing else imports it."""
