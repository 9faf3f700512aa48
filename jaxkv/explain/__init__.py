"""Why a prompt missed the prefix cache: two requests compared, or one looked up in a live engine, without running them."""

from jaxkv.explain.ask import Ask as Ask
from jaxkv.explain.ask import parse_ask as parse_ask
from jaxkv.explain.cause import Cause as Cause
from jaxkv.explain.compare import explain as explain
from jaxkv.explain.live import explain_live as explain_live
from jaxkv.explain.report import Explanation as Explanation
from jaxkv.explain.text import to_text as to_text
