"""Documents that cross a boundary, as pydantic models, and the JSON Schemas made from them."""
