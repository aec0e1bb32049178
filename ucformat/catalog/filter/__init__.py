"""The filter language of the catalog (docs/filters.md): parsed, checked and compiled to SQL."""
