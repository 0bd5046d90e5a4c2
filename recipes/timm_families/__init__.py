"""Which of timm's models take another attention: a survey of all of them, and the table that the plugin links."""
