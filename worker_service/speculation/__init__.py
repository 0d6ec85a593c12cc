"""Try tokens ahead of a row: propose them, and keep those that the row samples anyway (PROTOCOL B11). No torch."""
