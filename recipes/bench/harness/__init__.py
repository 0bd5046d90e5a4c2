"""The parts of a benchmark that know no operation and no model: comparing, timing, memory, records, tables, pictures.

Nothing here imports ``cases`` or ``targets``; they import this.
"""
