"""Worker processes that build and measure candidate programs."""
