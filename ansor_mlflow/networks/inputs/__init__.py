"""What becomes of the inputs that a file leaves open: sizes for dynamic axes, and values that are fixed."""
