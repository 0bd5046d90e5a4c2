"""What trains the rows of the tables, by experiment."""
