"""Pytest adds this folder to `sys.path` for this file, so that all subfolders can import its helper modules."""
