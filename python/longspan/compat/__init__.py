"""The names, arguments and return forms of packages that people come from, for code that shall not change.

`python -m longspan.compat` prints what each argument becomes. Nothing here is loaded before it is asked for.
"""
