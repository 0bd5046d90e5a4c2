"""The trainings of the tables' rows, by experiment."""
