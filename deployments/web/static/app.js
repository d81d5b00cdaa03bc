// The page's entry: the playground and the live view beside it, which know nothing of each other.

import * as chat from "./chat.js";
import * as live from "./live.js";

chat.start();
live.start();
