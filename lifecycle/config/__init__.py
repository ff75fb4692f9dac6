"""The operator's settings, and the configuration files that hostd and its daemons get from them."""
