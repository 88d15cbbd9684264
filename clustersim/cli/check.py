"""``clustersim check``: what a topology file describes, and what in it looks wrong."""

from __future__ import annotations

import click

from clustersim.cli.common import json_option, print_json, stdout, working
