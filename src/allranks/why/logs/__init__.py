"""From files to what their lines say."""
