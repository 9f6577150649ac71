"""A blend drawn as one HTML page, before it is trained on.

`data` says what is true (`facts`, `counts`, `curves`, `vocabulary` of it), `plots` draws by `svg`, `tables` and `page`
write, `report` puts the page on disk.
"""
