"""Any graph of machines: topology files and what builds them (``files``), and the routes over it (``routes``)."""
