"""Preprocessing: JSON Lines and Parquet to indexed datasets."""
