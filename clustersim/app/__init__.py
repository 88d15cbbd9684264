"""What a person sees: the commands (``cli``), pictures (``plots``), pages (``report``) and knobs (``explore``)."""
