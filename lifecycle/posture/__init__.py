"""What holds on this machine: the ways out, tried for real, and judged at the far end. `sallyport doctor --probe`."""
