"""Files on disk, for every folder: durable writes, regular files, untrusted JSON. Errors are OSError; callers name the fix."""
