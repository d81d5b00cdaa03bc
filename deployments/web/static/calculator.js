// The calculator tool: sums with + - * / and brackets, parsed here because the page may not evaluate code.

const DECIMALS = 4;
const MAX_DEPTH = 50; // of brackets and signs
const TOKENS = /\s*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()]))/y;

/** The value of an expression, rounded; throws an Error that the model can read. */
export function evaluate(expression) {
  if (typeof expression !== "string") throw new Error("expression must be a string");
  const tokens = split(expression.trim());
  const value = sum(tokens, 0);
  if (tokens.length) throw new Error(`unexpected ${tokens[0]}`);
  if (!Number.isFinite(value)) throw new Error("the result is too large");
  return Number(value.toFixed(DECIMALS));
}

function split(text) {
  const tokens = [];
  TOKENS.lastIndex = 0;
  while (TOKENS.lastIndex < text.length) {
    const start = TOKENS.lastIndex;
    const match = TOKENS.exec(text);
    if (!match) throw new Error(`unexpected ${text.slice(start).trim()[0]}`);
    tokens.push(match[1] ?? match[2]);
  }
  return tokens;
}

function sum(tokens, depth) {
  let value = product(tokens, depth);
  while (tokens[0] === "+" || tokens[0] === "-") {
    value = tokens.shift() === "+" ? value + product(tokens, depth) : value - product(tokens, depth);
  }
  return value;
}

function product(tokens, depth) {
  let value = operand(tokens, depth);
  while (tokens[0] === "*" || tokens[0] === "/") {
    const divides = tokens.shift() === "/";
    const other = operand(tokens, depth);
    if (divides && other === 0) throw new Error("division by zero");
    value = divides ? value / other : value * other;
  }
  return value;
}

function operand(tokens, depth) {
  if (depth > MAX_DEPTH) throw new Error("the expression is nested too deeply");
  const token = tokens.shift();
  if (token === undefined) throw new Error("the expression is incomplete");
  if (token === "-") return -operand(tokens, depth + 1);
  if (token === "(") {
    const value = sum(tokens, depth + 1);
    if (tokens.shift() !== ")") throw new Error("a bracket is not closed");
    return value;
  }
  if (Number.isNaN(Number(token))) throw new Error(`unexpected ${token}`);
  return Number(token);
}
