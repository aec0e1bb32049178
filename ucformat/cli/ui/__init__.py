"""What the commands share: options, output, text, and the catalog."""
