"""Pytest adds this folder to `sys.path`, so that all subfolders can import its helper modules."""
