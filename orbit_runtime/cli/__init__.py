"""The command `orbit`: parse, call, print. What a command does lives in the package that it calls."""
