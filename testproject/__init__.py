"""A Django project that fulfils orders: the demo, the tests' subject and an example to copy."""
