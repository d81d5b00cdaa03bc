// The entry of the page: starts the playground and the live view, which are independent.

import * as chat from "./chat.js";
import * as live from "./live.js";

chat.start();
live.start();
