"""The weight versions that slime, miles and SGLang exchange."""
