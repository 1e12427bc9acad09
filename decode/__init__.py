"""The decode worker: takes credits, pulls the pages, generates; or does a request all by itself."""
