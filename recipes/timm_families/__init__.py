"""A survey of all of timm's models: which support another attention. The plugin's README links the table."""
